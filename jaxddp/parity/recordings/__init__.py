"""Comparison of two recordings of `jaxddp.parity.Recorder`, one of torch and one of JAX.

run.py      reads a recording; lines.py checks what it reads
names.py    pairs JAX's arrays with torch's tensors, by names, shapes, order and values
aligned.py  brings a stage of JAX into torch's names and layouts, excerpts too
samples.py  identifies the examples of both sides
outside.py  finds what changes parameters outside of the updates
judge.py    judges each stage of each step, given its inputs; judgement.py holds what it finds
running_means.py  what biases before BatchNorm explain of its running means
clipping_rule.py  what a side does to its gradients before its optimizer gets them
causes.py   names causes: the only module that runs searches of jaxddp.parity.diagnosis
own_updates.py    torch's updates that are not those of its optimizer
remarks.py  what the recordings do not show
compare.py  all of these in order, as the findings of a check
command.py  `jaxddp compare`
"""
