# SPDX-License-Identifier: Apache-2.0
"""Files of rows, streamed: Parquet, CSV (also compressed), or a folder with one file per client.

CSV cells come as text. What they mean is decided when the whole file has been seen, never from its first lines.
"""

import codecs
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from coterie.data.parquet import check_header, check_texts, columns_of, rows_of
from coterie.errors import ConfigError, DataError
from coterie.limits import MOST_COLUMNS, MOST_LINE_BYTES

__all__ = ["PLAIN", "Csv", "Source", "is_table", "known_types", "listed", "open_source", "similar", "written_as"]

_PARQUET = (".parquet", ".pq")
_DELIMITERS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
_KNOWN = (*_PARQUET, *_DELIMITERS)
_BLOCK = MOST_LINE_BYTES  # bytes of CSV in a batch: a single line may not be longer
_END_OF_LINE = re.compile(rb"[\r\n]")
_RAGGED = re.compile(r"Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Csv:
    """How text files are written.

    Attributes
    ----------
    sep : str
        What stands between cells; by the file's name if it is empty: a comma, or a tab in ``.tsv``.
    decimal, thousands : str
        What stands before decimals, and between groups of three digits, if anything.
    encoding : str
        Of the text, as Python calls it.
    """

    sep: str = ""
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sep", "\t" if self.sep in ("\\t", "tab") else self.sep)
        for option, given, known in (
            ("sep", len(self.sep) <= 1, "one character, like ';', or tab"),
            ("decimal", self.decimal in (".", ","), "'.' or ','"),
            ("thousands", self.thousands in ("", ",", ".", "'", " ", "_"), "one of , . ' _ or a blank"),
        ):
            if not given:
                raise ConfigError(f"{option} is '{getattr(self, option)}'", f"write {known}")
        if self.thousands == self.decimal:
            raise ConfigError(
                f"'{self.decimal}' cannot be both the decimal and the thousands separator",
                "give --decimal and --thousands",
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ConfigError(
                f"there is no encoding '{self.encoding}'", "utf-8, utf-16, latin-1 and cp1252 are common"
            ) from None

    def between(self, file: Path) -> str:
        """What stands between the cells of a file."""
        return self.sep or _DELIMITERS[_suffix(file) or ".csv"]

    def spelled(self, batch: pa.RecordBatch, names: str) -> pa.RecordBatch:
        """Spell numbers as everybody does, in all columns but that of clients' names."""
        if self.decimal == "." and not self.thousands:
            return batch
        columns = [
            column if name == names else self._numbers(column)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    def _numbers(self, text: pa.Array) -> pa.Array:
        """Only cells that are numbers in this spelling are changed: '1.234,5' -> '1234.5', and '3,5 mg' stays."""
        decimal, thousands = re.escape(self.decimal), re.escape(self.thousands)
        whole = rf"(\d{{1,3}}({thousands}\d{{3}})+|\d+)" if self.thousands else r"\d+"
        ours = pc.match_substring_regex(text, rf"^\s*[-+]?({whole}({decimal}\d*)?|{decimal}\d+)([eE][-+]?\d+)?\s*$")
        plain = pc.replace_substring(text, self.thousands, "") if self.thousands else text
        plain = pc.replace_substring(plain, self.decimal, ".") if self.decimal != "." else plain
        return pc.if_else(ours, plain, text)


PLAIN = Csv()
_USUAL: ContextVar[Csv] = ContextVar("usual", default=PLAIN)


@contextmanager
def written_as(csv: Csv) -> Iterator[None]:
    """Take text files to be written like this where nothing else is said."""
    token = _USUAL.set(csv)
    try:
        yield
    finally:
        _USUAL.reset(token)


@dataclass(frozen=True)
class Source:
    """Rows in one file or in several with the same columns.

    Attributes
    ----------
    path : Path
        What was opened.
    files : tuple of Path
        The files in it, sorted by name.
    columns : tuple of str
        Column names in the order of the (first) file, followed by the client column when the file names stand for it.
    client : str
        The column that names the client of a row.
    by_file : bool
        Whether a client's name is the name of its file.
    csv : Csv
        How text files are written.
    """

    path: Path
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    client: str
    by_file: bool
    csv: Csv = PLAIN

    def batches(self, columns: Sequence[str], *, rows: int) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Stream some columns, at most `rows` rows at a time, and tell whether text may stand for numbers."""
        stored = [name for name in columns if not (self.by_file and name == self.client)]
        for file in self.files:
            for batch in _stream(file, stored, rows, self):
                for start in range(0, batch.num_rows, rows):
                    part = batch.slice(start, rows)
                    if self.by_file and self.client in columns:
                        owner = pa.repeat(_stem(file), part.num_rows)
                        names = [*part.schema.names, self.client]
                        part = pa.RecordBatch.from_arrays([*part.columns, owner], names=names)
                    yield part, _suffix(file) in _DELIMITERS


def open_source(path: str | Path, client: str | None, csv: Csv = PLAIN) -> Source:
    """Find the files and their columns.

    In a folder every file is a client, unless the files have a column with the name `client`.
    """
    path, csv = Path(path), _USUAL.get() if csv == PLAIN else csv
    if not path.exists():
        raise DataError(f"there is no file '{path}'", _near(path))
    if not path.is_dir():
        if client is None:
            raise DataError(f"the client column of '{path}' is not given", "name it with --client COLUMN")
        return Source(path, (path,), _columns(path, csv), client, False, csv)
    files = _files(path)
    columns = _columns(files[0], csv)
    for file in files[1:]:
        _same_columns(files[0], columns, file, _columns(file, csv))
    client = "client" if client is None else client
    if client in columns:
        return Source(path, files, columns, client, False, csv)
    _one_file_each(path, files)
    return Source(path, files, (*columns, client), client, True, csv)


@contextmanager
def known_types(source: Source) -> Iterator[None]:
    """Refuse columns of types that Arrow stores, and does nothing else with."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(
            f"'{source.path}' has a column of a type that cannot be read", "turn it into numbers or text first"
        ) from error


def similar(name: str, columns: Sequence[str]) -> str:
    """Hint at the column that was perhaps meant."""
    close = difflib.get_close_matches(name, columns, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    if len(columns) == 1 and (found := re.search(r"[;\t|]", columns[0])):
        meant = f"cells seem to be separated otherwise: --sep {'tab' if found[0] == chr(9) else repr(found[0])}; "
    return f"{meant}columns are: {listed(columns)}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Write some names in a row."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_table(path: Path) -> bool:
    """Tell by its name whether a file is one that can be read."""
    return _suffix(path) is not None


def _suffix(path: Path) -> str | None:
    return next((known for known in _KNOWN if path.name.lower().endswith(known)), None)


def _stem(path: Path) -> str:
    return path.name[: -len(_suffix(path) or "") or None]


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}' either"
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()], n=1)
    return f"did you mean '{path.parent / close[0]}'?" if close else "check the path"


def _files(folder: Path) -> tuple[Path, ...]:
    files = sorted(f for f in folder.iterdir() if f.is_file() and _suffix(f) and not f.name.startswith("."))
    if not files:
        raise DataError(f"folder '{folder}' has no file that can be read", f"known endings are {', '.join(_KNOWN)}")
    return tuple(files)


def _one_file_each(folder: Path, files: Sequence[Path]) -> None:
    name, times = Counter(_stem(file) for file in files).most_common(1)[0]
    if times > 1:
        raise DataError(f"folder '{folder}' has {times} files for client '{name}'", "keep one file for each client")


def _same_columns(first: Path, columns: Sequence[str], other: Path, others: Sequence[str]) -> None:
    odd = set(columns) ^ set(others)
    if odd:
        name = min(odd)
        has, lacks = (first, other) if name in columns else (other, first)
        raise DataError(
            f"files in '{first.parent}' have different columns: '{name}' is in '{has.name}' and not in '{lacks.name}'",
            "give every file the same columns",
        )


def _columns(file: Path, csv: Csv) -> tuple[str, ...]:
    suffix = _suffix(file)
    if suffix is None:
        raise DataError(f"'{file}' has no known ending", f"known are {', '.join(_KNOWN)}, or a folder of such files")
    with _readable(file):
        if file.stat().st_size == 0:
            raise DataError(f"file '{file}' is empty", "it needs a line of column names and at least one row")
        if suffix in _PARQUET:
            names = columns_of(file)
        else:
            _check_width(file, csv)
            with _open_csv(file, None, csv) as reader:
                names = reader.schema.names
            check_header(file, names)
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise DataError(f"file '{file}' has {times} columns with the name '{name}'", "give every column its own name")
    return tuple(names)


def _stream(file: Path, columns: list[str], rows: int, source: Source) -> Iterator[pa.RecordBatch]:
    with _readable(file):
        if _suffix(file) in _PARQUET:
            yield from rows_of(file, columns, rows)
        else:
            with _open_csv(file, columns, source.csv) as reader:
                for batch in reader:
                    check_texts(batch, file)
                    yield source.csv.spelled(batch, source.client)


def _check_width(file: Path, csv: Csv) -> None:
    """Refuse a header with too many columns before Arrow makes room for them, and text of two bytes a character."""
    delimiter = csv.between(file).encode()
    with pa.input_stream(file, compression="detect") as stream:
        begin: bytes = stream.read(_BLOCK)
    if csv.encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        begin = codecs.getincrementaldecoder(csv.encoding)("replace").decode(begin).encode()
    elif begin[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"file '{file}' has text in UTF-16", "--encoding utf-16, or save it as UTF-8")
    found = 0
    for part in begin.split(b'"', 2 * MOST_COLUMNS + 2)[::2]:  # every other one is within quotes
        line = _END_OF_LINE.split(part, 1)
        found += line[0].count(delimiter)
        if len(line) > 1:
            break
    if found >= MOST_COLUMNS:
        raise DataError(f"file '{file}' has {found + 1:,} columns; the limit is {MOST_COLUMNS:,}", "leave columns out")


def _open_csv(file: Path, columns: list[str] | None, csv: Csv) -> pa.csv.CSVStreamingReader:
    return pa.csv.open_csv(
        file,
        read_options=pa.csv.ReadOptions(block_size=_BLOCK, encoding=csv.encoding),
        parse_options=pa.csv.ParseOptions(delimiter=csv.between(file), newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns or (), pa.string()),
            strings_can_be_null=True,
        ),
    )


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Say in one sentence what is wrong with a file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise _complaint(file, error) from error


def _complaint(file: Path, error: Exception) -> DataError:
    text = str(error)
    if isinstance(error, PermissionError):
        return DataError(f"file '{file}' may not be read", "check its permissions")
    if "mpty CSV" in text:
        return DataError(f"file '{file}' is empty", "it needs a line of column names and at least one row")
    if found := _RAGGED.search(text):
        expected, got, line = found.groups()
        where = line.strip().split("\n")[0][:60]
        return DataError(
            f"file '{file}' has a line with {got} cells where the header has {expected}: '{where}'",
            "cells seem to be separated by semicolons: --sep ';', and --decimal , if numbers are written so"
            if ";" in line
            else "give every line as many cells as the header, and quote cells that contain the separator",
        )
    if "UTF8" in text or isinstance(error, UnicodeError):
        return DataError(
            f"file '{file}' has text that is not UTF-8, or not in the encoding that was given",
            "--encoding latin-1 (or cp1252) reads most older files; or save it as UTF-8",
        )
    if "straddl" in text:
        return DataError(f"file '{file}' has a line longer than {_BLOCK >> 20} MB", "look for a missing closing quote")
    what = "Parquet" if _suffix(file) in _PARQUET else "CSV"
    return DataError(f"file '{file}' cannot be read as {what}", "it may be cut short or damaged; write it again")
