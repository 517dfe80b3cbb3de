"""Functions of scores that the caller writes: traced with symbols, differentiated, evaluated and written as CUDA C++.

    symbols.py      what the caller's function computes with: NumPy's functions and Python's operators make nodes
    tracing.py      calls the function once, and gives a `Program`
    expressions.py  nodes, kinds and simplification
    state.py        what a function reads besides its arguments: if that has changed, it is traced again
    bounds.py       bounds of ints: which of them may exceed 32 bits
    linear.py       ints that are linear functions of q and k
    primitives.py   one row for each primitive operation: its kinds, its NumPy function, its CUDA C++
    derivatives.py  derivatives by the score and by elements of arguments
    built_in.py     functions that kernels compute as a keyword of their own
    terms.py        what of a function depends on the query, on the key, on their distance or on the head alone
    distances.py    expressions of q - k
    places.py       lines of the caller's function, for messages
    evaluation.py   values on NumPy and CuPy arrays
    text.py         functions in CUDA C++
    statements.py   and their statements

An expression has one of three kinds: bool, int (int32) and float (the dtype of lse: float32, or float64 for float64
data). Kinds follow NumPy's rules: int and float give float, and ``/`` of two ints gives float.

Values are those of the same operations of NumPy on int32 arrays and on floats of that dtype. Simplifications change no
bit, in either dtype. Texts have the same bits where a comparison, a floor or an int follows from a float; elsewhere
they may round otherwise (``text.py``).
"""
