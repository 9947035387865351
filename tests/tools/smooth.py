"""Adam with which rounding stays rounding."""

import torch


def smooth_adam(replace=setattr):
    """Give Adam and AdamW an epsilon of 1e-3, whatever a script gives them.

    They divide a gradient by its usual size plus epsilon. With 1e-5 and less a gradient that is
    rounding, and depends on the processor, moves a parameter; with 1e-3 it does not. replace:
    called as setattr.
    """
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):

        def make(parameters, *settings, optimizer=optimizer, **more):
            return optimizer(parameters, *settings, **more | {"eps": 1e-3})

        replace(torch.optim, optimizer.__name__, make)
