"""What the site has beside docs/: the README, source files that pages link to, and formulas."""

import json

from formulas import FONT, FormulaError, with_formulas
from links import PAGES, ROOT, SOURCE, file_of, linked_files, page_of, with_site_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebook import notebook_page
from source_pages import modules, source_page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that have a place or are linked, and the font of formulas."""
    texts = {file_of(page.src_uri): page.content_string for page in files.documentation_pages()}
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        texts[path] = notebook_page(json.loads(text)) if path.endswith(".ipynb") else text
        files.append(File.generated(config, page, content=texts[path]))
    linked = {each for path, text in texts.items() for each in linked_files(text, path)}
    shown = {each for each in linked if page_of(each).startswith(f"{SOURCE}/")}
    shown |= {module for each in shown for module in modules(ROOT, each)}
    # a link to a file that is not there is left for MkDocs to report
    for path in sorted(each for each in shown if (ROOT / each).exists()):
        page = File.generated(config, page_of(path), content=source_page(ROOT, path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    files.append(File.generated(config, f"assets/{FONT.name}", abs_src_path=str(FONT)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages."""
    return with_site_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas."""
    try:
        return with_formulas(html)
    except FormulaError as error:
        raise PluginError(f"{file_of(page.file.src_uri)}: {error}") from error
