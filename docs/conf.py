"""Sphinx: Markdown pages, and the API from the docstrings."""

from gpuprefetch import __version__

project = "gpuprefetch"
release = __version__
html_title = f"{project} {release}"
html_theme = "furo"
html_show_copyright = False
html_static_path = ["style.css"]
html_css_files = ["style.css"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "force"  # they are saved without outputs
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "exclude-members": "forward, extra_repr",
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = (
    True  # attributes are described once, by the docstring of their class
)
