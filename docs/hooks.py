"""mkdocs: a link from a page to a file outside of docs/ becomes its path in the repository.

Pages link to source files by relative paths, which work where the repository is browsed. The site has pages only.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page, with links out of docs/ pointing into the repository, or as plain text where its address is unknown."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if "://" in target or target.startswith("#") or files.get_file_from_path(path) is not None:
            return match.group(0)
        inside = path.removeprefix("../")
        if not path.startswith("../"):
            inside = f"docs/{path}"
            if "." in posixpath.basename(path) and not path.endswith((".csv", ".jsonl", ".py")):
                return match.group(0)  # a page or a picture that is missing: mkdocs warns of it
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{inside})"
        return text if inside in text else f"{text} (`{inside}`)"

    return LINK.sub(replace, markdown)
