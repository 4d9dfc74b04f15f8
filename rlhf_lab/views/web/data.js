"use strict";
const $ = (query, at = document) => at.querySelector(query);
const $$ = (query, at = document) => [...at.querySelectorAll(query)];

let header = {}, blocks = new Map();

function readHeader() {
  header = JSON.parse($("#header").textContent);
  blocks = new Map();
}

/** Return a promise of the content of a block; it is unpacked once. */
function block(id) {
  if (!blocks.has(id)) blocks.set(id, unpack(document.getElementById("block-" + id)));
  return blocks.get(id);
}

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Replace the content of an element by our own markup; scripts in it would not run. */
function put(place, markup) {
  const parsed = new DOMParser().parseFromString(markup, "text/html");
  const nodes = [...parsed.body.childNodes].map((node) => document.importNode(node, true));
  place.replaceChildren(...nodes);
  for (const element of $$("[data-style]", place)) element.style.cssText = element.dataset.style;
}

function make(tag, text, properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  element.textContent = text;
  return element;
}
