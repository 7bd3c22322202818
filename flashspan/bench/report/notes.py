"""Notes that explain the words and headings of a report, one at the top of each section."""

CONTEXT = (
    "A name like 8x1024, 16/4 heads is a model of 8 layers of width 1024, with 16 query heads and 4 key heads. "
    "Strategies are named with their layout of tokens (ring zigzag). MFU: share of the peak FLOP/s of all ranks. "
    "On a CPU that peak is a timed matmul. In matmuls: share of the computing time in matmuls. Comm/compute: "
    "time of the communication alone, relative to the computing. Hidden: share of the communication that runs at "
    "the same time as computing. Speed-up: time of one device over this time. A bar or a cell is a median."
)
SHAPE = (
    "A shape like 1x32/8x8192x128 causal is batch 1, 32 query heads, 8 key heads, 8192 tokens, head size 128 and "
    "the mask. Both passes: forward and backward together."
)
SPARSE = (
    "A shape like 1x16x8192x128 random 10% is batch 1, 16 heads, 8192 tokens, head size 128 and the mask; random "
    "10% visits 10% of the 128 x 128 blocks. Flashspan intervals and flashspan blocks are two ways to store a "
    "mask. Efficiency: the dense kernel's time times the share of visited blocks, divided by this kernel's time."
)
TRAINER = "A shape like 1.24B 1x8192 is a model of 1.24 billion parameters, batch 1 and 8192 tokens."
LISTED = "Pass: what was timed. Error: relative to float32 arithmetic on the same inputs. Empty: not measured."
MODEL = "A model like small 4x128 is the preset small, 4 sequences of 128 tokens. OOM: out of memory."
COLLECTIVES = (
    "The fit is time = µs + bytes / (GB/s), over all sizes of a primitive; `flashspan plan` computes with it. "
    "GB/s without fit: bytes over the time of this size."
)
SCHEDULE = (
    "The timeline has a lane per rank. A label q·k is a tile: queries of rank q, keys of rank k. The second "
    "picture shows the rank that computes each pair of a query and a key."
)
