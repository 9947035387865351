"""benchmark/bodies.py: what differs from Gymnasium's bodies, and what a target velocity pays."""

import copy
import math

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from benchmark import bodies

NAMES = list(bodies.BODIES)
DENSITY = 1000  # kg/m3, MuJoCo's default, which Hopper and Walker2d have


def make(name, **options):
    """One environment, as scripts make it."""
    return gym.make(f"benchmark.bodies:{name}-v0", disable_env_checker=True, **options)


def make_official(name):
    return gym.make(f"{name}-v5", disable_env_checker=True)


def list_differences(model, official, tolerance=0.0):
    """The names of the arrays of a model that are not those of another one."""
    names = [name for name in dir(model) if isinstance(getattr(model, name), np.ndarray)]
    assert len(names) > 300
    differences = set()
    for name in names:
        values = getattr(model, name)
        expected = getattr(official, name)
        if not np.allclose(values, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            differences.add(name)
    return differences


def assert_equal_steps(env, official, steps=100):
    """Both show, pay and end the same, bit for bit."""
    env.action_space.seed(0)
    count = 0
    for seed in range(steps):
        obs, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(obs, official.reset(seed=seed)[0])
        ended = False
        while not ended and count < steps:
            action = env.action_space.sample()
            obs, *results = env.step(action)
            official_obs, *official_results = official.step(action)
            np.testing.assert_array_equal(obs, official_obs)
            assert results == official_results
            ended = results[1]
            count += 1
    assert count == steps


@pytest.mark.parametrize("change", bodies.CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_factor_one_is_the_official_body(name, change):
    env = make(f"{name}-{change}-1.0")
    official = make_official(name)
    model = env.unwrapped.model
    assert list_differences(model, official.unwrapped.model) == set()
    for key in ("meanmass", "meaninertia", "extent"):
        assert getattr(model.stat, key) == getattr(official.unwrapped.model.stat, key)
    assert_equal_steps(env, official)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_gravity_is_changed_and_nothing_else(name, factor):
    model = make(f"{name}-gravity-{factor}").unwrapped.model
    official = make_official(name).unwrapped.model
    assert list_differences(model, official) == set()
    assert model.opt.gravity.tolist() == [0, 0, -9.81 * factor]


@pytest.mark.parametrize("factor", [0.6, 1.25])
def test_a_body_falls_by_its_gravity(factor):
    """From high up and at rest: in a step of 4 x 0.002 s, v = -g t and the way is g t^2 / 2."""
    env = make(f"Hopper-gravity-{factor}").unwrapped
    env.reset(seed=0)
    position = env.init_qpos.copy()
    position[1] = 5
    env.set_state(position, np.zeros(env.model.nv))
    env.step(np.zeros(3))
    assert env.data.qvel[1] == pytest.approx(-9.81 * factor * 0.008)
    assert env.data.qpos[1] == pytest.approx(5 - 9.81 * factor * 0.008**2 / 2, rel=1e-9)


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_mass_is_that_of_every_part(name, factor):
    """The arrays that differ are mass, inertia and what MuJoCo derives from them."""
    model = make(f"{name}-mass-{factor}").unwrapped.model
    official = make_official(name).unwrapped.model
    np.testing.assert_allclose(model.body_mass, factor * official.body_mass)
    np.testing.assert_allclose(model.body_inertia, factor * official.body_inertia)
    derived = {"body_subtreemass", "body_invweight0", "dof_M0", "dof_invweight0", "actuator_acc0"}
    differences = list_differences(model, official, tolerance=1e-12)
    assert differences == {"body_mass", "body_inertia", *derived}


def test_the_same_torque_moves_a_heavier_body_less():
    speeds = []
    for factor in (0.5, 1.0, 2.0):
        env = make(f"HalfCheetah-mass-{factor}").unwrapped
        env.reset(seed=0)
        position = env.init_qpos.copy()
        position[1] = 5
        env.set_state(position, np.zeros(env.model.nv))
        env.step(np.array([0, 0, 0, 1, 0, 0]))
        speeds.append(env.data.qvel[6])
    assert speeds[0] > speeds[1] > speeds[2] > 0


def find_forces(env):
    """The torques of all motors for the action 0.5, 0.6, 0.7, ..."""
    env.reset(seed=0)
    env.step(0.5 + 0.1 * np.arange(env.unwrapped.model.nu))
    return env.unwrapped.data.actuator_force.copy(), env.unwrapped.data.qfrc_actuator.copy()


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_motors_have_their_torque(name, factor):
    env = make(f"{name}-motor-{factor}")
    official = make_official(name)
    differences = list_differences(env.unwrapped.model, official.unwrapped.model)
    assert differences == {"actuator_gear", "actuator_acc0"}
    _, torques = find_forces(env)
    _, official_torques = find_forces(official)
    assert np.count_nonzero(torques) == env.unwrapped.model.nu
    np.testing.assert_allclose(torques, factor * official_torques)
    assert env.action_space == official.action_space


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_weakens_one_motor(name):
    """That of the joint of its name; also to nothing."""
    official = make_official(name)
    _, official_torques = find_forces(official)
    _, motors = bodies.BODIES[name]
    assert len(motors) == official.unwrapped.model.nu
    for motor in motors:
        for strength in (0.0, 0.3):
            env = make(f"{name}-fault-{motor}-{strength}")
            differences = list_differences(env.unwrapped.model, official.unwrapped.model)
            assert differences == {"actuator_gear", "actuator_acc0"}
            joint = motor if name == "HalfCheetah" else f"{motor}_joint"
            expected = official_torques.copy()
            (dof,) = env.unwrapped.model.joint(joint).dofadr
            assert expected[dof] != 0
            expected[dof] *= strength
            np.testing.assert_allclose(find_forces(env)[1], expected)


def find_joints(env):
    """Where the joints are at the first position, [joints, 3], without the torso's three."""
    env = env.unwrapped
    env.reset(seed=0)
    env.set_state(env.init_qpos, env.init_qvel)
    return env.data.xanchor[3:] - env.data.body("torso").xpos


def find_clearance(env):
    """How far the floor is from a body at its first position, by MuJoCo."""
    env = env.unwrapped
    env.reset(seed=0)
    env.set_state(env.init_qpos, env.init_qvel)
    distances = []
    for geom in range(1, env.model.ngeom):
        distances.append(mujoco.mj_geomDistance(env.model, env.data, 0, geom, 10, None))
    return min(distances)


@pytest.mark.parametrize("factor", [0.5, 1.25, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_limbs_have_their_length(name, factor):
    """Between joints and of the parts; hips and thickness stay, and feet as far above the floor."""
    env = make(f"{name}-limb-{factor}")
    official = make_official(name)
    model = env.unwrapped.model
    official_model = official.unwrapped.model
    torso = [geom for geom in range(model.ngeom) if model.geom_bodyid[geom] <= 1]
    limbs = slice(len(torso), None)
    np.testing.assert_array_equal(model.geom_size[torso], official_model.geom_size[torso])
    scale = np.array([1, factor, 1])  # radius, half the length, nothing
    np.testing.assert_allclose(model.geom_size[limbs], scale * official_model.geom_size[limbs])
    # Parts are where they were between their joints
    np.testing.assert_allclose(model.geom_pos[limbs], factor * official_model.geom_pos[limbs])

    joints = find_joints(env)
    official_joints = find_joints(official)
    count = len(joints)
    for chain in (range(3), range(3, 6))[: count // 3]:
        hip = joints[chain[0]]
        official_hip = official_joints[chain[0]]
        np.testing.assert_allclose(hip, official_hip, atol=1e-12)
        offsets = official_joints[chain] - official_hip
        np.testing.assert_allclose(joints[chain] - hip, factor * offsets, atol=1e-12)
    assert find_clearance(env) == pytest.approx(find_clearance(official))
    joint_arrays = {"jnt_range", "jnt_stiffness", "dof_damping", "dof_armature", "actuator_gear"}
    assert not list_differences(model, official_model) & joint_arrays


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_longer_limbs_weigh_more_by_volume(name, factor):
    """Each is a capsule of the official density, with the inertia of one."""
    model = make(f"{name}-limb-{factor}").unwrapped.model
    official = make_official(name).unwrapped.model
    density = DENSITY
    if name == "HalfCheetah":  # 14 kg in all
        volume = sum(math.pi * r**2 * (2 * h + 4 / 3 * r) for r, h, _ in official.geom_size[1:])
        density = 14 / volume
    for body in range(2, model.nbody):
        radius, half, _ = model.geom_size[model.body_geomadr[body]]
        cylinder = density * math.pi * radius**2 * 2 * half
        balls = density * 4 / 3 * math.pi * radius**3
        assert model.body_mass[body] == pytest.approx(cylinder + balls)
        along = cylinder * radius**2 / 2 + balls * 2 / 5 * radius**2
        assert model.body_inertia[body].min() == pytest.approx(along)
        across = cylinder * (radius**2 / 4 + half**2 / 3)
        # Of two half balls, at each end of the cylinder
        across += balls * (2 / 5 * radius**2 + half**2 + 3 / 4 * half * radius)
        assert model.body_inertia[body].max() == pytest.approx(across)
    assert model.body_mass[1] == pytest.approx(official.body_mass[1])  # the torso


def test_heights_follow_the_limbs():
    """Hopper: 0.95 m between hip and ankle, which is the middle of the foot, at 0.1 m."""
    for name, low, high in (("Hopper", 0.7, math.inf), ("Walker2d", 0.8, 2.0)):
        for factor in (0.5, 1.0, 2.0):
            env = make(f"{name}-limb-{factor}").unwrapped
            height = 1.25 + 0.95 * (factor - 1)
            obs, _ = env.reset(seed=0)
            assert obs[0] == pytest.approx(height, abs=0.005)
            assert env.init_qpos[1] == pytest.approx(height)
            assert env.data.body("torso").xpos[2] == pytest.approx(env.data.qpos[1])
            ratio = height / 1.25
            assert env._healthy_z_range == pytest.approx((low * ratio, high * ratio))
            for z, is_healthy in ((1.01 * low * ratio, True), (0.99 * low * ratio, False)):
                env.set_state(np.array([0, z, *np.zeros(env.model.nq - 2)]), env.init_qvel)
                assert env.is_healthy == is_healthy
    assert make("HalfCheetah-limb-2.0").unwrapped.init_qpos[1] == 0


def test_a_copy_has_the_same_body():
    env = make("Hopper-limb-2.0").unwrapped
    duplicate = copy.deepcopy(env)
    assert list_differences(duplicate.model, env.model) == set()
    assert duplicate._healthy_z_range == env._healthy_z_range


def test_the_frame_buffer_fits_pictures():
    """As in Gymnasium's bodies: at least the file's, as large as is asked for."""
    for options in ({}, {"width": 1000, "height": 700}):
        buffer = make("Hopper-mass-2.0", **options).unwrapped.model.vis.global_
        official = gym.make("Hopper-v5", **options).unwrapped.model.vis.global_
        assert (buffer.offwidth, buffer.offheight) == (official.offwidth, official.offheight)


@pytest.mark.parametrize("target", [0.5, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_target_velocity_pays_for_itself(name, target):
    """v up to the target, less above; all the rest is that of the official body."""
    env = make(f"{name}-speed-{target}")
    official = make_official(name)
    cost = 0.1 if name == "HalfCheetah" else 0.001
    survival = 0.0 if name == "HalfCheetah" else 1.0
    generator = np.random.default_rng(0)
    slower = 0
    faster = 0
    for start in np.linspace(-3, 7, 21):
        env.reset(seed=0)
        official.reset(seed=0)
        velocity = env.unwrapped.init_qvel.copy()
        velocity[0] = start
        for copy_of_body in (env.unwrapped, official.unwrapped):
            copy_of_body.set_state(copy_of_body.init_qpos, velocity)
        action = generator.uniform(-1, 1, env.action_space.shape)
        before = env.unwrapped.data.qpos[0]
        obs, reward, terminated, truncated, info = env.step(action)
        speed = (env.unwrapped.data.qpos[0] - before) / env.unwrapped.dt
        paid = speed if speed <= target else 2 * target - speed
        slower += speed <= target
        faster += speed > target
        expected = paid - cost * np.sum(action**2)
        expected += survival * (not terminated)
        assert reward == pytest.approx(expected)
        assert info["reward_forward"] == pytest.approx(paid)
        official_obs, official_reward, *ends, _ = official.step(action)
        np.testing.assert_array_equal(obs, official_obs)
        assert [terminated, truncated] == ends
        if speed <= target:
            assert reward == pytest.approx(official_reward)
    assert slower > 5
    assert faster > 5


def test_a_body_with_a_target_velocity_falls_as_the_official_one():
    env = make("Hopper-speed-1")
    env.reset(seed=0)
    terminated = False
    for _ in range(300):
        action = np.ones(3)
        _, reward, terminated, _, info = env.step(action)
        if terminated:
            break
    assert terminated
    assert info["reward_survive"] == 0
    speed = info["x_velocity"]
    assert reward == pytest.approx(1 - abs(speed - 1) - 0.003)


@pytest.mark.parametrize("factor", [0.7, 1.0, 3.0])
def test_the_power_of_the_car(factor):
    """The equations of MountainCarContinuous with another power, and its reward."""
    env = make(f"MountainCarContinuous-motor-{factor}")
    assert env.unwrapped.power == 0.0015 * factor
    obs, _ = env.reset(seed=3)
    position, velocity = (float(x) for x in obs)
    assert velocity == 0
    for action in (1.0, -0.5, 0.25, -1.0, 1.0):
        obs, reward, terminated, _, _ = env.step(np.array([action]))
        velocity += action * 0.0015 * factor - 0.0025 * math.cos(3 * position)
        position += velocity
        assert obs == pytest.approx(np.array([position, velocity]), abs=1e-6)
        assert reward == pytest.approx(-0.1 * action**2)
        assert not terminated
    if factor == 1.0:
        assert_equal_steps(env, gym.make("MountainCarContinuous-v0"))


def list_ids():
    """All tasks, by their official one."""
    ids = {}
    for name, (_, motors) in bodies.BODIES.items():
        for factor in bodies.FACTORS:
            for change in ("gravity", "mass", "limb", "motor"):
                ids[f"{name}-{change}-{factor}-v0"] = f"{name}-v5"
        for motor in motors:
            for strength in bodies.STRENGTHS:
                ids[f"{name}-fault-{motor}-{strength}-v0"] = f"{name}-v5"
        for target in bodies.TARGETS:
            ids[f"{name}-speed-{target}-v0"] = f"{name}-v5"
    for factor in bodies.FACTORS:
        ids[f"MountainCarContinuous-motor-{factor}-v0"] = "MountainCarContinuous-v0"
    return ids


def test_every_task_is_made_by_its_name():
    """With the official spaces and time limit, also with Gymnasium's checks."""
    ids = list_ids()
    assert len(ids) == 264
    officials = {env_id: gym.make(env_id) for env_id in set(ids.values())}
    for env_id, official_id in ids.items():
        env = gym.make(f"benchmark.bodies:{env_id}")
        official = officials[official_id]
        assert env.spec.id == env_id
        assert env.spec.max_episode_steps == official.spec.max_episode_steps
        assert env.observation_space == official.observation_space
        assert env.action_space == official.action_space
        obs, _ = env.reset(seed=0)
        assert obs in env.observation_space
        env.step(env.action_space.sample())
        env.close()


def test_the_table_has_every_number():
    """What the docstring lists is what is registered."""
    text = " ".join(bodies.__doc__.split())
    for word, numbers in (
        ("FACTOR", bodies.FACTORS),
        ("STRENGTH", bodies.STRENGTHS),
        ("TARGET", bodies.TARGETS),
    ):
        *others, last = (str(number) for number in numbers)
        listed = f"{', '.join(others)} or {last}"
        assert f"{word} is {listed}" in text or f"{word} {listed}" in text


@pytest.mark.parametrize(
    ("env_id", "limit"),
    [
        ("HalfCheetah-limb-1.5", 1000),
        ("HalfCheetah-speed-2", 1000),
        ("MountainCarContinuous-motor-0.7", 999),
    ],
)
def test_the_time_limit_truncates(env_id, limit):
    env = make(env_id)
    env.reset(seed=0)
    still = np.zeros(env.action_space.shape, dtype=np.float32)
    ends = [env.step(still)[2:4] for _ in range(limit)]
    assert set(ends[:-1]) == {(False, False)}
    assert ends[-1] == (False, True)
