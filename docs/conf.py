"""Settings of the documentation's build."""

project = "Edgewise"
author = "the Edgewise contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Edgewise"
myst_heading_anchors = 3
nitpicky = False
