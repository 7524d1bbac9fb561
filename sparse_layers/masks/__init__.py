"""Masks: frozen, hashable values that say which query may attend to which key, without lengths, heads or devices.

A new rule is a class in `primitives.py`, or in `grids.py` if tokens have coordinates. A combination of existing masks
is a preset: one docstring and one expression in `presets.py` or `grid_presets.py`. `adapters.py` reads masks of other
libraries, files like `deepspeed.py` their configurations.

The room imports numpy, and of JAX only its errors and what makes masks static in pytrees and exported programs.
"""

from .adapters import MaskMod as MaskMod
from .adapters import as_masks as as_masks
from .adapters import from_mask_mod as from_mask_mod
from .algebra import And as And
from .algebra import Array as Array
from .algebra import Blocks as Blocks
from .algebra import Mask as Mask
from .algebra import Not as Not
from .algebra import Or as Or
from .algebra import Shifted as Shifted
from .algebra import Transposed as Transposed
from .deepspeed import from_deepspeed as from_deepspeed
from .graphs import Graph as Graph
from .graphs import from_csr as from_csr
from .graphs import spatial_order as spatial_order
from .grids import ColumnMajor as ColumnMajor
from .grids import Grid as Grid
from .grids import Neighborhood as Neighborhood
from .grids import Radial as Radial
from .presets import preset as preset
from .presets import preset_options as preset_options
from .presets import presets as presets
from .primitives import BlockDiagonal as BlockDiagonal
from .primitives import Causal as Causal
from .primitives import Columns as Columns
from .primitives import Compressed as Compressed
from .primitives import Empty as Empty
from .primitives import Full as Full
from .primitives import Global as Global
from .primitives import LogSparse as LogSparse
from .primitives import Prefix as Prefix
from .primitives import Random as Random
from .primitives import Strided as Strided
from .primitives import Window as Window
from .rectangles import Rectangle as Rectangle
