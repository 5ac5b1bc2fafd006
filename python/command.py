#!python
# The command of a wheel, put beside the interpreter.
from heddle.__main__ import main

main()
