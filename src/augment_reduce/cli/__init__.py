"""augment-reduce fit | predict | evaluate | demo | reproduce.

app.py        the commands as typed, and their error handling
reproduce.py  the command `reproduce` as typed
options.py    every option with its help, defined once
commands.py   what the commands do: files in, a model file or numbers out
reading.py    reading data files for the commands
writing.py    output files, standard output
show.py       results as tables, csv, JSON
wording.py    the library's messages in terms of options
"""

from .app import app, main

__all__ = ["app", "main"]
