# SPDX-License-Identifier: Apache-2.0
"""Everything that coterie raises on purpose: one tree, each with a way out."""

__all__ = ["ConfigError", "CoterieError", "DataError", "RunError"]


# Names of strangers are in messages: they may end lines, colour the terminal, or be half a character.
_CONTROL = dict.fromkeys([*range(32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd") | dict.fromkeys(
    b"\t\n\r", " "
)


def _one_line(text: str) -> str:
    return text.translate(_CONTROL)


class CoterieError(Exception):
    """One sentence about what is wrong and where, and a hint about the way out.

    Parameters
    ----------
    message : str
        What is wrong and where, in one sentence.
    hint : str, optional
        What to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = _one_line(message), _one_line(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class DataError(CoterieError, ValueError):
    """The data cannot be read or cannot be used as asked: a `ValueError` too, which scikit-learn's tools expect."""


class ConfigError(CoterieError):
    """An option or a combination of options makes no sense."""


class RunError(CoterieError):
    """A run folder is missing, broken, or does not fit what is asked of it."""
