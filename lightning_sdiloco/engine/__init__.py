"""The engine: launches and lands the fragments of a model in any PyTorch training loop.

It takes a model, which an inner optimizer trains, and one call after every inner step; it leaves
the outer model. Start reading at `rounds`, which is Algorithm 2, then `flight`, `fragments` and
`engine`, which has the verbs of a training loop. `fragmented_model` cuts the model, `shards` knows
how it holds its parameters, `outer` holds the outer optimizer; `turns` lets groups in one process
wait for each other. Nothing in this folder knows Lightning or the environment, and it reaches other
ranks only through a `Topology`.

[Note: threads] Each mutable object has one thread that writes to it. Objects change hands at the
events of this table, and every one of them is ordered by a queue or a lock.

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
