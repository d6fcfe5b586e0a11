"""Which of very many texts came before. Knows nothing of what they are."""

import hashlib
import sqlite3


class SeenIds:
    """A set on the disk: a nameless database that goes with the process, however it ends, and whose part in memory
    does not grow."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(
            "", isolation_level=None
        )  # "": a temporary file, removed once it is open
        self.connection.execute("PRAGMA journal_mode = OFF")
        self.connection.execute("PRAGMA synchronous = OFF")
        self.connection.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, text: str) -> bool:
        """Is it new?"""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return self.connection.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self.connection.close()
