"""Section 4 of the paper, reproduced: `augment-reduce reproduce`.

settings.py    the paper's settings and the numbers it printed, in one table each
sources.py     the data of a study, or random data of its shape if the files are not available
cells.py       one cell (a dataset, a method, a seed): train, evaluate, checkpoint, resume
evaluate.py    the measures of a trained cell
synthetic.py   the measures of section 4.1
store.py       the results folder: finished cells and checkpoints
runner.py      plans the cells of a target and runs them, optionally several at a time
progress.py    progress of the cells
tables.py      paper | ours | difference, as rows
show.py        formatting of the tables
figure.py      figure 2 and the learning curves, for paper (png, pdf) and page (svg)
report.py      the page, from page.py's template
command.py     all of it, from the arguments (cli/reproduce.py) to the written results
"""
