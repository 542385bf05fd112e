"""DeepSpeed's dialect of a program.

`instructions` turns a schedule into each rank's stream of instructions. `reader` finds out which microbatch each instruction of a stream
is about and what is wrong with it. `text` writes streams to files and reads them back.
"""

from penstock.passes.deepspeed.instructions import STYLES, Instruction, Stream, stream, streams

__all__ = ["STYLES", "Instruction", "Stream", "stream", "streams"]
