"""What is said: timing records read from files, and the tables made from them.

    stored JSON -> records.py -> Measurement -> tables.py -> text, Markdown

Nothing here measures or judges; standard library and tabulate only.
"""
