"""Sphinx: Markdown pages, and the API from the docstrings."""

import os
import tomllib
from pathlib import Path

from docutils import nodes
from gpuprefetch import __version__
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# None as long as there is no public one.
REPOSITORY = PYPROJECT["project"].get("urls", {}).get("Repository")

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


class FilesOfTheRepository(SphinxTransform):
    """Links to files that are no pages lead to the repository, or are their paths.

    Otherwise Sphinx copies each of them, and offers it as a download.
    """

    default_priority = 500

    def apply(self, **kwargs: object) -> None:
        """Replace the downloads that MyST made of such links."""
        page = Path(self.env.doc2path(self.env.docname)).parent
        for link in [*self.document.findall(addnodes.download_reference)]:
            found = os.path.relpath(page / link["reftarget"], ROOT)
            if REPOSITORY:
                address = f"{REPOSITORY}/blob/main/{found}"
                made = nodes.reference("", "", refuri=address)
            else:
                made = nodes.abbreviation("", "", explanation=found)
            made += link.children
            link.replace_self(made)


def setup(app):
    """Register the transform."""
    app.add_transform(FilesOfTheRepository)
