"""Tasks of agents with bodies of their own, or speeds of their own, for continuous control.

    python prpo_mujoco.py --num-agents 2 --env-ids \\
        benchmark.bodies:Hopper-gravity-0.6-v0 benchmark.bodies:Hopper-gravity-1.25-v0

| task | what differs from BODY-v5 of Gymnasium |
| --- | --- |
| BODY-gravity-FACTOR-v0 | gravity |
| BODY-mass-FACTOR-v0 | mass and inertia of all parts |
| BODY-limb-FACTOR-v0 | the length of all parts below the torso, feet included |
| BODY-motor-FACTOR-v0 | the torque of all motors |
| BODY-fault-MOTOR-STRENGTH-v0 | the torque of one motor |
| BODY-speed-TARGET-v0 | the reward: it pays for this speed, in m/s |
| MountainCarContinuous-motor-FACTOR-v0 | the power of MountainCarContinuous-v0 |

BODY is HalfCheetah, Hopper or Walker2d; their motors are in BODIES. FACTOR is 0.5, 0.6, 0.7, 0.75,
0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0 or 3.0, STRENGTH 0.0, 0.1, 0.2, 0.3, 0.5 or 0.7, TARGET 0.5, 1,
1.5, 2, 3 or 4. Observations and actions do not show any of these, but for their consequences.

Longer limbs keep thickness, density, motors, springs and ranges of joints. The torso begins higher,
so that the feet begin as far above the floor, and the heights at which an episode ends grow as the
torso's first height does.

A target replaces the forward reward v by TARGET - |v - TARGET|: v itself up to the target. This is
the reward of MAML's HalfCheetah with target velocities (Finn, Abbeel and Levine, 2017), -|v -
TARGET|, and a constant, without which a slow Hopper would do best to fall at once. Other rewards
and costs stay.
"""

import warnings

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv

# Body -> its class and its motors
BODIES = {
    "HalfCheetah": (HalfCheetahEnv, ("bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot")),
    "Hopper": (HopperEnv, ("thigh", "leg", "foot")),
    "Walker2d": (
        Walker2dEnv,
        ("thigh", "leg", "foot", "thigh_left", "leg_left", "foot_left"),
    ),
}
CHANGES = ("gravity", "mass", "limb", "motor")
FACTORS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)
TARGETS = (0.5, 1, 1.5, 2, 3, 4)


def compile_copy(spec: mujoco.MjSpec) -> mujoco.MjModel:
    """A body whose mass follows from volumes and densities."""
    spec = spec.copy()
    spec.compiler.settotalmass = -1
    return spec.compile()


def weigh(spec: mujoco.MjSpec) -> float:
    """The mass of a body by volumes and densities, in kg."""
    return mujoco.mj_getTotalmass(compile_copy(spec))


def find_lowest(spec: mujoco.MjSpec) -> float:
    """The height of a body's lowest point at its first position, in m."""
    model = compile_copy(spec)
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    # All but the first, the floor, are capsules: a radius around a line along their z-axis
    radius, half_length, _ = model.geom_size.T
    slope = np.abs(data.geom_xmat[:, 8])
    lowest = data.geom_xpos[:, 2] - slope * half_length - radius
    return lowest[1:].min()


def scale_limbs(spec: mujoco.MjSpec, factor: float) -> None:
    """Lengthen all parts below the torso, and lift the torso by what that takes."""
    lowest = find_lowest(spec)
    for body in spec.bodies[2:]:  # the first two are the world and the torso
        if body.parent.name != "torso":  # the hip stays where it is
            body.pos *= factor
        for joint in body.joints:
            joint.pos *= factor
        for geom in body.geoms:
            geom.pos *= factor
            geom.size[1] *= factor
    torso = spec.body("torso")
    height = torso.pos[2]
    torso.pos[2] += lowest - find_lowest(spec)
    # What an observation shows at the torso's first height: that height, or 0 (HalfCheetah)
    spec.joint("rootz").ref *= torso.pos[2] / height


def change_body(spec: mujoco.MjSpec, change: str, factor: float) -> None:
    """Multiply a property of a body by a factor."""
    mass = weigh(spec)
    if change == "gravity":
        spec.option.gravity *= factor
    elif change == "mass":
        for geom in spec.geoms:
            geom.density *= factor
    elif change == "limb":
        scale_limbs(spec, factor)
    for actuator in spec.actuators:
        motor = actuator.target.removesuffix("_joint")
        if change in ("motor", f"fault-{motor}"):
            actuator.gear *= factor
    # HalfCheetah's file sets the total mass, which would undo a change; others have -1 there
    spec.compiler.settotalmass *= weigh(spec) / mass


def make_body(name: str, change: str, factor: float, **options) -> gym.Env:
    """A body of Gymnasium with one property changed."""
    env_class, _ = BODIES[name]

    class Body(env_class):
        def _initialize_simulation(self):
            spec = mujoco.MjSpec.from_file(self.fullpath)
            height = spec.body("torso").pos[2]
            change_body(spec, change, factor)
            if name != "HalfCheetah":  # which cannot fall
                ratio = spec.body("torso").pos[2] / height
                self._healthy_z_range = tuple(ratio * z for z in self._healthy_z_range)
            with warnings.catch_warnings(action="ignore"):  # settotalmass is deprecated
                model = spec.compile()
            # As in Gymnasium's
            model.vis.global_.offwidth = max(model.vis.global_.offwidth, self.width)
            model.vis.global_.offheight = max(model.vis.global_.offheight, self.height)
            return model, mujoco.MjData(model)

    return Body(**options)


class Speed(gym.Wrapper):
    """The reward pays for a target velocity."""

    def __init__(self, env: gym.Env, target: float):
        super().__init__(env)
        self.target = target

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        info["reward_forward"] = self.target - abs(info["x_velocity"] - self.target)
        reward = info["reward_forward"] + info.get("reward_survive", 0.0) + info["reward_ctrl"]
        return obs, reward, terminated, truncated, info


def make_speed(name: str, target: float, **options) -> gym.Env:
    """A body of Gymnasium with a target velocity."""
    env_class, _ = BODIES[name]
    return Speed(env_class(**options), target)


def make_car(factor: float, **options) -> gym.Env:
    """MountainCarContinuous with another motor."""
    env = Continuous_MountainCarEnv(**options)
    env.power *= factor
    return env


def register() -> None:
    """Make the tasks known to Gymnasium."""
    for name, (_, motors) in BODIES.items():
        changes = [(change, factor) for change in CHANGES for factor in FACTORS]
        changes += [(f"fault-{motor}", strength) for motor in motors for strength in STRENGTHS]
        for change, factor in changes:
            env_id = f"{name}-{change}-{factor}-v0"
            kwargs = {"name": name, "change": change, "factor": factor}
            gym.register(env_id, make_body, max_episode_steps=1000, kwargs=kwargs)
        for target in TARGETS:
            env_id = f"{name}-speed-{target}-v0"
            kwargs = {"name": name, "target": target}
            gym.register(env_id, make_speed, max_episode_steps=1000, kwargs=kwargs)
    for factor in FACTORS:
        env_id = f"MountainCarContinuous-motor-{factor}-v0"
        gym.register(env_id, make_car, max_episode_steps=999, kwargs={"factor": factor})


register()
