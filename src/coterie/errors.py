# SPDX-License-Identifier: Apache-2.0
"""Everything that coterie raises on purpose: one tree, each with a way out."""

__all__ = ["ConfigError", "CoterieError", "DataError", "RunError"]


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
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class DataError(CoterieError):
    """The data cannot be read or cannot be used as asked."""


class ConfigError(CoterieError):
    """An option or a combination of options makes no sense."""


class RunError(CoterieError):
    """A run folder is missing, broken, or does not fit what is asked of it."""
