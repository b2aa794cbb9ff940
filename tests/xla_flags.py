"""XLA's flags in tests, whose programs are small and compiled once or twice.

They are compiled as they come: that takes a third of the time, and what LLVM
would make of them runs for milliseconds. XLA's own passes stay as users have
them; .ci/run ends with a job that is compiled as theirs are.
"""

import importlib.metadata

_FAST = (
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
)
# XLA ends a process whose flags it does not know, and this one may go again.
_FAST_0_10 = ("--xla_cpu_use_fusion_emitters=false",)


def flags(num_devices: int = 1) -> str:
  """The value of XLA_FLAGS for so many fake CPU devices."""
  known = importlib.metadata.version("jaxlib").startswith("0.10.")
  devices = f"--xla_force_host_platform_device_count={num_devices}"
  return " ".join([devices, *_FAST, *(_FAST_0_10 if known else ())])
