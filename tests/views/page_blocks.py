"""The packed data of a page about a run."""

import base64
import json
import re
import zlib
from typing import Any


def read_blocks(page: str) -> dict[str, Any]:
    """Return the blocks of a page by id."""
    found = re.findall('<script type="text/plain" id="block-(.*?)">(.*?)</script>', page)
    return {id: json.loads(zlib.decompress(base64.b64decode(text))) for id, text in found}


def read_header(page: str) -> dict[str, Any]:
    """Return what the script of a page reads first."""
    return json.loads(re.search('id="header">(.*?)</script>', page)[1])
