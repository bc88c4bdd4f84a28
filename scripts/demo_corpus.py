"""The corpus of the demo model, and the committed texts that are written from it.

Owns: reading English prose out of a Python installation (the language reference
in ``pydoc_data.topics``; docstrings and block comments of the standard library,
read with ``ast`` and never imported), cleaning it into paragraphs, and the
train/held-out split; and, all under ``src/stowage/demo``, ``heldout.txt`` (every
held-out topic, cleaned), ``document.txt`` (the held-out topics named in
``DOCUMENT_TOPICS``, cut at a paragraph) and ``calibration.txt`` (what begins each
other topic). Writing is deterministic for one Python version; the committed files
were written by the version in ``model/card.json``.

    python scripts/demo_corpus.py            # print what the corpus holds
    python scripts/demo_corpus.py --write    # rewrite the three files

Invariants:

* The split is by topic name alone (a hash), so it is the same on every machine.
* No training paragraph shares a run of ``SHINGLE_WORDS`` words with a held-out
  topic or with the committed ``heldout.txt``: the reference quotes itself
  (``compound`` contains ``with``, ``specialnames`` contains ``customization``),
  so a split by name alone would leak.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from stowage.demo.corpus import HERE, heldout_text  # noqa: E402  (needs the path above in a bare checkout)

DOCUMENT_TOPICS = ("topic:execmodel", "topic:import", "topic:customization")
DOCUMENT_CHARS = 13_500  # about 3,000 tokens of the demo tokenizer
CALIBRATION_CHARS = 1_400  # of each topic: 40 kB in all, about 9,000 tokens of a usual tokenizer
HELDOUT_BUCKETS = 8
HELDOUT_BUCKET = 1  # customization, execmodel, identifiers, import, strings, ...
SHINGLE_WORDS = 12  # long enough that shared boilerplate phrases do not count
# Third-party code is not Python's; many installations leave the test suite out.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "pydoc_data", "__pycache__", "test", "tests"})

_QUOTES = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2018": "'",
        "\u2019": "'",
        "\u2026": "...",
        "\u2013": "-",
        "\u2014": " - ",
        "\u2022": "*",
        "\u2192": "->",
        "\u00a0": " ",
    }
)
_COMMON_WORDS = frozenset(
    "the a an of is to in and that for if be this are it with not as by or on from "
    "when which can will must has have was at its any all".split()
)
_UNDERLINE = re.compile(r"^([*=\-~^#+_])\1{2,}$")
_ROLE = re.compile(r":[a-z]+(?::[a-z]+)?:`~?([^`<]+?)(?:\s*<[^`]*>)?`")
_ITEM = re.compile(r"^(?:[*+-]|\d{1,2}[.)])\s+")
_CODE = re.compile(r"::=|>>>|^\s*(?:def|class|import|from|@)\s*\w+.*:?$|[{}=]{2}|\\\\|<[a-z/]+>")
_WORD = re.compile(r"[a-z0-9_]+")
_COMMENT = re.compile(r"^\s*#(?!!)[#:]?\s?(.*)$")


@dataclass(frozen=True)
class Document:
    """One named text: ``topic:with`` or ``module:json/decoder.py``; paragraphs in order."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The paragraphs, separated by one blank line."""
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Corpus:
    """The split: training documents and held-out documents, each sorted by name."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]


def is_held_out(topic: str) -> bool:
    """Whether the topic of that name is held out: first SHA-256 byte modulo 8."""
    return hashlib.sha256(topic.encode()).digest()[0] % HELDOUT_BUCKETS == HELDOUT_BUCKET


def _plain(text: str) -> str:
    """Strip reStructuredText markup and typographic quotes from running text."""
    text = _ROLE.sub(r'"\1"', text.translate(_QUOTES))
    text = re.sub(r"``([^`]+)``", r'"\1"', text)
    text = re.sub(r"`([^`<]+?)(?:\s*<[^`]*>)?`_{0,2}", r'"\1"', text)
    text = re.sub(r"\*\*([^*\s][^*]*)\*\*", r"\1", text)
    text = re.sub(r"(?<![\w*])\*([A-Za-z_][\w ]*)\*(?![\w*])", r"\1", text)
    text = re.sub(r"\(see section [^)]*\)", "", text)
    return re.sub(r"\s+", " ", re.sub(r"\s+([,.;:])(?=\s|$)", r"\1", text)).strip()


def _is_prose(text: str, least_chars: int = 60) -> bool:
    """Whether a joined paragraph reads as English sentences rather than code or a table."""
    words = text.lower().split()
    if len(text) < least_chars or len(words) < 9 or _CODE.search(text):
        return False
    common = sum(word.strip('.,;:()"') in _COMMON_WORDS for word in words)
    letters = sum(char.isalpha() or char in " .,'" for char in text)
    return common >= max(2, 0.15 * len(words)) and letters >= 0.88 * len(text)


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines between blank lines, with each list item a run of its own."""
    run: list[str] = []
    for line in text.expandtabs().splitlines():
        fresh = not line.strip() or _ITEM.match(line.strip())
        if fresh and run:
            yield run
            run = []
        if line.strip():
            run.append(line)
    if run:
        yield run


def prose_paragraphs(text: str) -> list[str]:
    """The English paragraphs of ``text``, each on one line, markup and code dropped.

    A heading (a line underlined with punctuation) is kept when a paragraph follows it.
    """
    kept: list[str] = []
    heading = ""
    for block in _blocks(text):
        lines = [line.strip() for line in block]
        if len(lines) >= 2 and _UNDERLINE.match(lines[1]):
            heading = _plain(lines[0])
            lines = lines[2:]
        lines = [line for line in lines if not _UNDERLINE.match(line)]
        item = _ITEM.match(lines[0]) if lines else None
        joined = _plain(" ".join(lines)[item.end() if item else 0 :])
        if not _is_prose(joined):
            continue
        if heading:
            kept.append(heading)
            heading = ""
        kept.append(f"* {joined}" if item else joined)
    return kept


def topic_documents() -> list[Document]:
    """The language reference of this Python, one document per topic, sorted by name."""
    from pydoc_data.topics import topics

    found = (Document(f"topic:{name}", tuple(prose_paragraphs(topics[name]))) for name in sorted(topics))
    return [document for document in found if document.paragraphs]


def _comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each run of whole-line comments in ``source``."""
    run: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        match = _COMMENT.match(line)
        if match:
            run.append(match.group(1))
        elif run:
            yield number, "\n".join(run)
            run = []


def source_paragraphs(source: str) -> list[str]:
    """English of one Python file: docstrings and block comments in source order.

    Raises ``SyntaxError`` where ``source`` is not Python this interpreter can parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files warn while parsing
        tree = ast.parse(source)
    pieces = list(_comment_blocks(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                pieces.append((node.body[0].lineno, text))
    return [paragraph for _, text in sorted(pieces) for paragraph in prose_paragraphs(text)]


def library_documents(root: Path | None = None) -> list[Document]:
    """One document per standard-library module that carries English, sorted by path.

    ``root`` is the folder to read (the running Python's own library by default).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            paragraphs = source_paragraphs(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # lib2to3 and others carry files broken on purpose
            continue
        if paragraphs:
            documents.append(Document(f"module:{relative.as_posix()}", tuple(paragraphs)))
    return documents


def shingles(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of ``SHINGLE_WORDS`` lower-case words of ``text``, punctuation ignored."""
    words = _WORD.findall(text.lower())
    for start in range(len(words) - SHINGLE_WORDS + 1):
        yield tuple(words[start : start + SHINGLE_WORDS])


def _without(documents: Iterable[Document], banned: set[tuple[str, ...]], banned_short: set[str]) -> Iterator[Document]:
    """``documents`` less banned paragraphs and less paragraphs seen before."""
    seen: set[str] = set()
    for document in documents:
        kept: list[str] = []
        for paragraph in document.paragraphs:
            key = " ".join(_WORD.findall(paragraph.lower()))
            if key in seen or key in banned_short or not banned.isdisjoint(shingles(paragraph)):
                continue
            seen.add(key)
            kept.append(paragraph)
        if kept:
            yield Document(document.name, tuple(kept))


def build_corpus(include_library: bool = True) -> Corpus:
    """Read this Python's English and split it; see the module docstring for the invariants.

    ``include_library=False`` reads the language reference only (under a second).
    """
    topics = topic_documents()
    heldout = tuple(t for t in topics if is_held_out(t.name.removeprefix("topic:")))
    reference = [t for t in topics if not is_held_out(t.name.removeprefix("topic:"))]
    banned_text = [paragraph for topic in heldout for paragraph in topic.paragraphs]
    if (HERE / "heldout.txt").is_file():  # absent only while that file is first written
        banned_text += heldout_text().split("\n\n")
    banned = {run for paragraph in banned_text for run in shingles(paragraph)}
    short = {" ".join(_WORD.findall(paragraph.lower())) for paragraph in banned_text}
    library = library_documents() if include_library else []
    return Corpus(tuple(_without([*reference, *library], banned, short)), heldout)


def document(heldout: tuple[Document, ...]) -> str:
    """The demo document: whole paragraphs of ``DOCUMENT_TOPICS``, at most ``DOCUMENT_CHARS``."""
    by_name = {topic.name: topic for topic in heldout}
    kept: list[str] = []
    size = 0
    for name in DOCUMENT_TOPICS:
        for paragraph in by_name[name].paragraphs:
            size += len(paragraph) + 2
            if size > DOCUMENT_CHARS:
                return "\n\n".join(kept)
            kept.append(paragraph)
    return "\n\n".join(kept)


def calibration(train: tuple[Document, ...]) -> str:
    """Whole paragraphs, none twice: of each topic those that begin it, at most ``CALIBRATION_CHARS``."""
    kept: dict[str, None] = {}
    for topic in train:
        size = 0
        for paragraph in topic.paragraphs:
            size += len(paragraph) + 2
            if size > CALIBRATION_CHARS:
                break
            kept.setdefault(paragraph)
    return "\n\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite heldout.txt, document.txt and calibration.txt")
    options = parser.parse_args()
    built = build_corpus()
    for part, documents in (("train", built.train), ("held-out", built.heldout)):
        chars = sum(len(d.text) for d in documents)
        print(f"{part}: {len(documents)} documents, {chars} characters")
    print("held-out topics:", ", ".join(d.name for d in built.heldout))
    if options.write:
        heldout = "\n\n".join(d.text for d in built.heldout) + "\n"
        (HERE / "heldout.txt").write_text(heldout, encoding="utf-8")
        (HERE / "document.txt").write_text(document(built.heldout) + "\n", encoding="utf-8")
        topics = tuple(d for d in built.train if d.name.startswith("topic:"))
        (HERE / "calibration.txt").write_text(calibration(topics) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
