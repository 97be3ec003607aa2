"""The compiled library, and which of its kernels the calls of a thread may take."""
