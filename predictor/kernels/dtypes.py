"""Number formats of GEMMs, and whose measured kernels stand for each."""

from __future__ import annotations

BLOCKWISE = "fp8_blockwise"  #: fp8 with scales for blocks (predictor.kernels.block_scaled)
#: Number format -> arithmetic; 16-bit floats run equally fast and share one fit.
FAMILIES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    BLOCKWISE: "fp8",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "tf32",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
}
UNMEASURED = ("mxfp8", BLOCKWISE)  #: formats whose GEMMs are those of another that was measured
HALF_BYTES = 2.0  #: bytes of a 16-bit element
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0, "tf32": 4.0, "nvfp4": 0.5625}
