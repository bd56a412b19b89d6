"""``python -m predictor.network``: the command in predictor.network.ship."""

from predictor.network.ship import main

if __name__ == "__main__":
    main()
