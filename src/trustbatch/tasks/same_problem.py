"""When two problems count as the same one."""

import re
import unicodedata

WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> str:
    """Return the words and numbers of a text in lower case: spaces and signs don't matter.

    Numbers stay apart from each other: [14, 11, 22] is not [14, 11, 2, 2].
    """
    return " ".join(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))
