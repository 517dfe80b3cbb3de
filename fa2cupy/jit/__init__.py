"""From the key of a kernel to machine code: parameter record, source, compiler, cache."""
