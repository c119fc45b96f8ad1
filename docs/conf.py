"""Sphinx: Markdown pages, and the API from the docstrings."""

project = "gpuprefetch"
html_title = project
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "forward, extra_repr"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = True  # attributes are described once, by the docstring of their class
