from harts_hf.kernels.gather.api import gather_rows

__all__ = ["gather_rows"]
