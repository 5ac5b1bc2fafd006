"""Sphinx's settings: the Markdown pages as they are, furo's theme, nothing from the network. docs/README.md lists the pages; the
navigation is that list."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from sphinx.util import inspect, logging  # noqa: E402
from text import ROOT, escaped  # noqa: E402

logger = logging.getLogger(__name__)

project = "Heddle"
author = "The Heddle authors"
copyright = "The Heddle authors; Apache 2.0"  # noqa: A001
release = version = re.search(r"project\(heddle VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/**", "build/reference/**"]
exclude_patterns = [".*", "report"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
highlight_language = "text"
primary_domain = "py"

myst_heading_anchors = 6

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # whole_signature() has them
python_use_unqualified_type_names = True
python_maximum_signature_line_length = cpp_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Sources"]

html_theme = "furo"
html_title = f"Heddle {release}"
html_static_path = ["static"]
html_css_files = ["heddle.css"]
html_extra_path = ["index.html"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
copybutton_prompt_text = ">>> "


def pages_by_section() -> dict[str, list[str]]:
    """The Markdown pages that docs/README.md links to, under the heading where each is named first."""
    sections: dict[str, list[str]] = {}
    named: set[str] = set()
    for part in re.split(r"^## ", (ROOT / "docs/README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        listed = sections.setdefault(heading, [])
        for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
            page = str((ROOT / "docs" / link).resolve().relative_to(ROOT).with_suffix(""))
            if page not in named:
                named.add(page)
                listed.append(page)
    return sections


def look_for_results(app, page, source):
    """A file of bench/results that a page names without a link is there."""
    for name in re.findall(r"`(bench/results/[^`*]+\.json)`", source[0]):
        if not (ROOT / name).exists():
            logger.warning("there is no %s", name, location=page)


def add_navigation(app, page, source):
    """Of the first page all sections, of the kernels' page its own."""
    if page == root_doc:
        sections = {"": ["docs/README"], **pages_by_section()}
        sections["Reference"] += [f"build/reference/{page}" for page in ("python/index", "cpp/index", "command")]
        for heading, listed in sections.items():
            source[0] += "\n".join(
                ["\n```{toctree}", ":hidden:", *([f":caption: {heading}"] if heading else []), "", *listed, "```\n"]
            )
    elif page == "docs/kernels/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def escape_docstring(app, what, name, value, options, lines):
    """Docstrings are plain text with literals. Their examples stay as they are; names of arguments that go on in the next line are
    joined, as napoleon wants them."""
    for i in reversed(range(len(lines) - 1)):
        if re.fullmatch(r"\s+(\w+, )+\w+,", lines[i]):
            lines[i : i + 2] = [f"{lines[i]} {lines[i + 1].strip()}"]
    example = False
    for i, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if not example:
            lines[i] = escaped(line)


def whole_signature(app, what, name, value, options, arguments, returned):
    """A function's own arguments and types, and not those of its overloads; `Any` says nothing that a reader could use."""
    if not callable(value) or not arguments:
        return None
    found = inspect.signature(value)
    bound = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    text = inspect.stringify_signature(found.replace(parameters=bound), unqualified_typehints=True)
    arguments, _, returned = re.sub(r": Any(?=[ ,)])(?! \|)", "", text.replace("~typing.", "")).rpartition(")")
    returned = returned.removeprefix(" -> ")
    return arguments + ")", None if returned == "Any" or inspect.isclass(value) else returned


def setup(app):
    app.connect("source-read", look_for_results)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", whole_signature)
