"""When to use each schedule. Figures in these texts are those of the pages, which the tests hold to the simulator."""

ADVICE = {
    "1f1b": "The schedule to begin with, and to compare others with. Every stage runs as it is: no split backward, one stage a rank, the fewest messages. "
    "Take another one when its bubble hurts (few microbatches for the ranks) or its memory does not fit.",
    "1f1b-v": "When 1f1b does not fit and the backward cannot be split, for example because the stages are compiled: the bubble of 1f1b, two thirds of its "
    "activations, twice its messages.",
    "chimera": "When parameters are small beside activations, so that two copies of the model fit, and a forward takes about as long as a full backward. With "
    "B = 2F, which is usual, that is lost where there are many microbatches: it is then slower than 1f1b.",
    "data-parallel": "When the model fits on one device: then a pipeline has nothing to offer. It is also what a pipeline is compared with on one rank.",
    "dualpipe": "When messages are expensive, as those of experts are: a forward and a backward run together and hide each other's. Needs two copies of the "
    "parameters, an even number of ranks, and an executor that can overlap (`Pipeline(..., overlap=...)`); one after the other, its parts give the same numbers.",
    "dualpipe-v": "Where dualpipe is wanted without the second copy of the parameters. Twice the messages of 1f1b, to be hidden behind overlapped work.",
    "eager-1f1b": "When messages are slow and memory is there: with a latency of half a forward, 1f1b waits in each round and this one does not. With fast "
    "links it holds almost twice as much for nothing.",
    "gpipe": "When the order matters more than the memory: all forwards run before any backward. Also the simplest order to debug with.",
    "grouped-interleaved": "When interleaving is wanted and its memory is not there: groups of half the ranks hold about half of what interleaved-1f1b does, with "
    "a bubble that is about as large. Needs a split backward.",
    "hanayo": "When the bubble must shrink and the backward cannot be split: waves fill and drain the pipeline by smaller chunks. More waves, more messages.",
    "inference": "For evaluation and generation. `Pipeline.eval_step` and `Pipeline.infer` use it by themselves, whatever schedule the training runs.",
    "interleaved-1f1b": "The usual way to a smaller bubble with full backwards: v chunks a rank divide it by v. It holds more than 1f1b and sends about v times "
    "as much, so the links between ranks must be fast.",
    "interleaved-zb": "When links are fast and backwards split: the bubble of zb-h1 over v, at the memory of 1f1b, for about v times its messages.",
    "looped-bfs": "With sharded parameters: each chunk's are gathered once forward and once backward. It holds the whole batch, so use it with few or small "
    "microbatches.",
    "v-half": "When 1f1b does not fit: about half of its activations, and less than half of its bubble. Needs a split backward.",
    "v-min": "When memory is what counts: about a third of the activations of 1f1b where there are many ranks, with a smaller bubble than it. Needs a split backward.",
    "zb-auto": "When forward and backwards take different times, or ranks have a memory limit between those of zb-h1 and zb-h2: the order is searched for your "
    "costs. Give them with `costs=` and `memory_limit=`; `penstock plan` does it from a profile.",
    "zb-h1": "The first step from 1f1b: the same placement, messages and memory, and with equal times a third of the bubble. Needs a split backward.",
    "zb-h2": "When there is memory for twice the activations of 1f1b and the optimizer does not wait for all ranks: then no bubble is left. With a barrier "
    "before the optimizer, ranks still start one after the other, and zb-h1 is as quick for half the memory.",
    "zbv": "The usual choice where backwards split: a sixth of the bubble of 1f1b at its memory. Twice the messages, and F, I and W should take about the same.",
}
