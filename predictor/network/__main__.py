"""``python -m predictor.network``: the command in predictor.network.fit_published."""

from predictor.network.fit_published import main

if __name__ == "__main__":
    main()
