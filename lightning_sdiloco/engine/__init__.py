"""The engine that launches and lands a model's fragments in any PyTorch training loop.

The training loop calls the engine after every inner step. When training ends, the model contains
the outer parameters. Start with `rounds`, which implements Algorithm 2. Continue with `flight`,
`fragments` and `engine`. The last of these defines the methods that a training loop calls.
`fragmented_model` divides the model into fragments, `shards` describes how a model stores its
parameters, and `outer` contains the outer optimizer. `turns` lets multiple groups in one process
wait for each other. The engine does not depend on Lightning or on environment variables, and it
reaches other ranks only through a `Topology`.

[Note: threads] Each mutable object is written to by exactly one thread. The table shows how objects
are handed from one thread to another. Each handover is ordered by a queue or a lock.

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
