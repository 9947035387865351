"""WebShop for prpo_babyai.py, the other world of the FedAgent paper.

    PYTHONPATH=WebShop python prpo_babyai.py --env benchmark/worlds/webshop.py:make --max-turns 15

Its repository (princeton-nlp/WebShop, set up as it says) has to be on the path of Python. It is not
installed here: this has been written to its interface, and only the message without it is tested.
"""

import functools
import importlib.util

import gymnasium as gym
from gymnasium import spaces

CHARACTERS = "".join(map(chr, (*range(32, 127), 10)))
HELD_OUT = 500  # the first goals, as in the paper's code
PRODUCTS = 1000


@functools.cache
def load_shop():
    """The shop, which all episodes share: each has a session of its own."""
    if not importlib.util.find_spec("web_agent_site"):
        raise ImportError("WebShop is not on the path: clone princeton-nlp/WebShop, set PYTHONPATH")
    site = importlib.import_module("web_agent_site.envs.web_agent_text_env")
    return site.WebAgentTextEnv(observation_mode="text", num_products=PRODUCTS, human_goals=True)


def make(split: str, index: int) -> gym.Env:
    """A purchase: split is test (the first 500 goals) or train (the others)."""
    goals = len(load_shop().server.goals)
    session = index + HELD_OUT if split == "train" else index
    if session >= (goals if split == "train" else min(goals, HELD_OUT)):
        raise IndexError(f"{split} has no task {index}")
    return Purchase(session, load_shop().server.goals[session]["category"])


class Purchase(gym.Env):
    """A goal of WebShop; an action is search[words] or click[button]."""

    observation_space = spaces.Text(20_000)
    action_space = spaces.Text(200, charset=CHARACTERS)

    def __init__(self, session: int, category: str):
        self.session = session
        self.category = category  # of the product, such as beauty

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The first page."""
        super().reset(seed=seed)
        site = importlib.import_module("web_agent_site.envs.web_agent_text_env")
        server = load_shop().server
        options = {"observation_mode": "text", "server": server, "session_prefix": f"{id(self)}-"}
        self.browser = site.WebAgentTextEnv(**options)
        text, _ = self.browser.reset(session=self.session)
        return text, self.inform(0.0)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """A search or a click; the reward is 10 for exactly what was asked for, else 0."""
        text, score, done, _ = self.browser.step(action)
        return text, 10.0 * (score == 1.0), bool(done), False, self.inform(score)

    def inform(self, score: float) -> dict:
        """What goes with every observation; where one may search, any text is admissible.

        score: the task score that the paper reports, 0 to 1, of the purchase.
        """
        available = self.browser.get_available_actions()
        actions = [f"click[{name}]" for name in available["clickables"] if name != "search"]
        if available["has_search_bar"]:
            actions = []
        task = self.browser.instruction_text
        return {"task": task, "actions": actions, "success": score == 1.0, "score": score}
