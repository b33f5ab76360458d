"""Names the version of the library; the packaging reads it here."""

VERSION = "0.2.0"
