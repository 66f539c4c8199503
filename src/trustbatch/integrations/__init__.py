"""The objectives inside other libraries' trainers.

`step_totals` has what every integration needs, and imports nothing but torch. Each other module is
for one library, which is imported there alone.
"""
