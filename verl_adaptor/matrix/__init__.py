"""The compatibility matrix: which backend works with which version, layout and model family, measured cell by cell.

``cells.py`` reads what is to be measured, ``measure.py`` measures one cell in the process it runs in, ``run.py`` makes the
environments and a process for each cell, ``results.py`` reads what was found and compares it, ``render.py`` shows it.
"""
