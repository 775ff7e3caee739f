# SPDX-License-Identifier: Apache-2.0
"""How much is taken in at most: of tables, of documents that anybody may have written, and of options.

Whatever is beyond is refused with one sentence, before anything is made of it. `docs/limits.md` is written from here.
"""

__all__ = [
    "LARGEST_NUMBER",
    "LARGEST_RESULT",
    "MOST_CELLS",
    "MOST_CLASSES",
    "MOST_COLUMNS",
    "MOST_CONFIG_BYTES",
    "MOST_COUNT",
    "MOST_DEPTH",
    "MOST_DOCUMENT_BYTES",
    "MOST_FEATURES",
    "MOST_FOOTER_BYTES",
    "MOST_LAYERS",
    "MOST_LEVELS",
    "MOST_LINE_BYTES",
    "MOST_NAME",
    "MOST_PARAMETERS",
    "MOST_PARTS",
    "MOST_SITE_BYTES",
    "MOST_SITE_NUMBERS",
    "MOST_STATE_VALUES",
    "MOST_STEPS",
    "MOST_TABLE_FOOTER_BYTES",
    "MOST_TEXT",
    "MOST_UNITS",
    "MOST_VALUES",
]

# -- tables: Parquet, CSV, arrays ---------------------------------------------------------------------------------------
LARGEST_NUMBER = 1e50  #: size of a number in a table, or of an option; fourth powers of it can still be summed
MOST_COLUMNS = 20_000  #: columns of a table
MOST_FEATURES = 100_000  #: numbers that a row becomes, once every category is an indicator
MOST_NAME = 1000  #: characters in the name of a client, a column, a category or a class
MOST_LEVELS = 100  #: categories of a column
MOST_CLASSES = 1000  #: classes of a target
MOST_LINE_BYTES = 4 << 20  #: bytes of a line of CSV, and of its header
MOST_FOOTER_BYTES = 32 << 20  #: bytes in which a Parquet file says what it holds
MOST_TABLE_FOOTER_BYTES = 4 << 20  #: bytes in which a table of a run folder says what it holds

# -- documents: run.json, compare.json, what models say of themselves, site summaries, configurations --------------------
MOST_DOCUMENT_BYTES = 100_000_000  #: bytes of a JSON document
MOST_VALUES = 4_000_000  #: values in `run.json` and `compare.json`
MOST_STATE_VALUES = 16_000_000  #: values that a checkpoint, or stored models, have beside their tensors
MOST_DEPTH = 20  #: lists and groups within each other
MOST_TEXT = 100_000  #: characters of a text in a document
LARGEST_RESULT = 1e150  #: size of a number in a document; runs write null for larger ones
MOST_COUNT = (1 << 63) - 1  #: size of a whole number in a document, and of a seed
MOST_CELLS = 32_000_000  #: cells of a table in a run folder
MOST_SITE_BYTES = 256 << 20  #: bytes of a site summary
MOST_SITE_NUMBERS = 16_000_000  #: numbers in a site summary
MOST_CONFIG_BYTES = 1 << 20  #: bytes of a configuration file

# -- options ------------------------------------------------------------------------------------------------------------
MOST_STEPS = 1_000_000  #: rounds, steps, passes and whatever else only takes time; rows of a batch
MOST_PARTS = 10_000  #: clusters, components, starts, anchors, ranks: whatever is made all at once
MOST_LAYERS = 100  #: hidden layers of a network
MOST_UNITS = 100_000  #: units of a hidden layer
MOST_PARAMETERS = 1 << 28  #: numbers in all models that are trained side by side, and in one that is read
