"""Settings of Sphinx: ``python -m sphinx -W --keep-going -b html docs build/docs``."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout comes before an installed fa2cupy

import fa2cupy

project = "fa2cupy"
author = "the authors of fa2cupy"
version = release = fa2cupy.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc", "myst_parser"]
default_role = "autolink"  # single backticks of docstrings: a link if the name is public
nitpicky = True  # a whole name, such as fa2cupy.forward, that is not in the API reference is an error
nitpick_ignore_regex = [("py:obj", r"(?!fa2cupy\.).*")]  # parameters that have the name of a module
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # pages link to headings as on GitHub: masks.md#windows
exclude_patterns = ["build"]
highlight_language = "text"  # of blocks that name no language

html_theme = "furo"
html_title = f"fa2cupy {version}"
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have the types of parameters in words
numpydoc_show_class_members = False


class LinkedNames(SphinxTransform):
    """Links code such as ``fa2cupy.forward`` in a page to the API reference, so that pages stay plain Markdown."""

    default_priority = 5  # before references are resolved

    def apply(self, **_: object) -> None:
        """Replaces the code of a document that begins with a name of the package."""
        for code in list(self.document.findall(nodes.literal)):
            name = re.match(r"fa2cupy(\.\w+)+(?!/)", code.astext())
            if name and not isinstance(code.parent, (nodes.reference, pending_xref)):
                link = pending_xref("", refdomain="py", reftype="obj", reftarget=name[0], refdoc=self.env.docname)
                code.replace_self(link)
                link += code


def setup(app: Sphinx) -> None:
    """Adds what this project needs to Sphinx."""
    app.add_transform(LinkedNames)
