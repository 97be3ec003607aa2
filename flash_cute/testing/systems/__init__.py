"""Random cases of the systems: ``python -m flash_cute.testing.fuzz --systems``.

A system is a module with a frozen dataclass ``Case`` whose fields can be dumped as JSON,
``draw(pick)``, which makes a random one, and ``check(case, device)``, which returns
:class:`Findings`. The expected results are computed in fp64 in plain PyTorch (``oracle.py``),
without flash_cute.
"""

from flash_cute.testing.systems.cases import NAMES, SystemTrial, draw
from flash_cute.testing.systems.findings import Findings

__all__ = ["NAMES", "Findings", "SystemTrial", "draw"]
