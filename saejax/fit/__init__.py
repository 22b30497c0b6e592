"""L7: everything that trains is trained here, whoever asks and whatever learns.

    Materials -> resolve -> Coders ----+
    prefix's models and records -------+-> Learner -> train(learner, folder) -> Outcome

`resolve` closes the settings that an experiment leaves open, once. A single run is a sweep of one.
"""
