"""Views of a run: live panel, colored tokens, pictures, the page about a run."""

from rlhf_lab.views.diagrams import gae_diagram, loop_diagram, patch_diagram
from rlhf_lab.views.live import RunView, sample_table, sparkline
from rlhf_lab.views.pictures import Html, Picture
from rlhf_lab.views.plots import bars, curves, heatmap
from rlhf_lab.views.records import short_site
from rlhf_lab.views.report import write_report
from rlhf_lab.views.tokens import color_key, tokens_html, tokens_text
