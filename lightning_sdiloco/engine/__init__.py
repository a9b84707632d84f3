"""The engine: launches and lands the fragments of a model in any PyTorch training loop.

It takes a model, which an inner optimizer trains, and one call after every inner step. At the end,
the model contains the outer parameters. Start reading at `rounds`, which is Algorithm 2, then
`flight`, `fragments` and `engine`, which has the methods for a training loop. `fragmented_model`
divides the model into fragments, `shards` describes how a model stores its parameters, and `outer`
has the outer optimizer. `turns` lets groups in one process wait for each other. Nothing in this
folder depends on Lightning or the environment, and it reaches other ranks only through a
`Topology`.

[Note: threads] Each mutable object has one thread that writes to it. Objects are handed over at the
events in this table, each of which is ordered by a queue or a lock.

============================  ==========================  ==============================
object                        thread that writes to it    handed over by
============================  ==========================  ==============================
model, inner optimizers,      training thread             never
`WeightCopies`
`FragmentState`,              training thread, at a       never; the background reads
`UntrainedState`              launch, landing or load     what no landing changes
`StreamingDiLoCo`, `Rounds`,  training thread             never
`FragmentedModel`,
`Timetable`, `History`,
`StepClock`, `LinkRate`
`RequestBits`                 any thread, bit by bit      the next launch, which takes
                                                          the bits that are set
`Launch`                      none: it is immutable       the queue of the background
`Flight` and its parts        the thread of its stage     the queue of the next stage
exchange of payloads          first stage: post           a handle in the flight
                              second stage: collect
second hop                    second stage: post          a handle in the flight
                              third stage: collect
the user's outer optimizer    last stage                  the order of the flights
`Arrival`                     last stage                  the lock of `Pending`
============================  ==========================  ==============================
"""
