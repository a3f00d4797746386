"""augment-reduce fit | predict | evaluate | demo.

app.py       the commands as they are typed, and what happens when something goes wrong
options.py   every option with its help, defined once
commands.py  what the commands do: files in, a model file or numbers out
reading.py   data files as the commands read them
show.py      what a person or a program sees of the results
"""

from .app import app, main

__all__ = ["app", "main"]
