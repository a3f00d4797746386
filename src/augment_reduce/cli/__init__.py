"""augment-reduce fit | predict | evaluate | demo | reproduce.

app.py        the commands with their arguments, and error handling
reproduce.py  the command `reproduce` with its arguments
options.py    every option with its help, defined once
commands.py   the commands' work: files in, a model file or numbers out
reading.py    reading data files for the commands
writing.py    output files, standard output
show.py       results as tables, csv, JSON
wording.py    the library's messages in terms of options
"""

from .app import app, main

__all__ = ["app", "main"]
