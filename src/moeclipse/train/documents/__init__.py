"""Documents of files of any kind, as tokens that are made once."""
