"""The compiled library, and limits of the kernels that calls of a thread may run."""
