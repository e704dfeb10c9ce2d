"""KVPR, Tables 3 to 5: decoding with the KV cache in host memory, by Equation 10 and its best split point.

Tables 3 and 4 keep the weights on an A100; Table 5 streams them to a smaller GPU, shared by eight batches of 32
(column by column). Beside link and processor, a step takes time that grows with neither cache nor recomputation.
"""

from __future__ import annotations

from megakv.costmodel.shape import ModelShape
from megakv.offload.kvpr import split_point, split_seconds
from megakv.offload.prices import GroupPrices, LayerPrices, WeightTimes

from .fit import Constant, Constants, model_shape
from .published import Cell

LARGE_GPU = ("kvpr_table_3", "kvpr_table_4")
SMALL_GPU = ("kvpr_table_5",)
BATCH = 64
COLUMN_BATCH, COLUMN_BATCHES = 32, 8
CONSTANTS = {
    "link_bytes_s": Constant(24e9, 5e9, 32e9),
    "recompute_flops": Constant(100e12, 1e12, 312e12),
    "layer_s": Constant(2e-3, 1e-5, 2e-2),
}
SMALL_CONSTANTS = {
    "link_bytes_s": Constant(10e9, 2e9, 16e9),
    "recompute_flops": Constant(30e12, 0.5e12, 89.2e12),
    "layer_s": Constant(1e-3, 1e-5, 2e-2),
}


def predict(cell: Cell, constants: Constants) -> float:
    """Seconds of decoding, or tokens per second."""
    setting = cell.setting
    model, prompt, steps = model_shape(setting["model"]), setting["prompt"], setting["generated"] - 1
    column = cell.table.name in SMALL_GPU
    prices = layer_prices(model, constants, batch=COLUMN_BATCH if column else BATCH)
    if column:
        weights = model.layers[0].dense * model.element_bytes / constants["link_bytes_s"]
        prices = prices.with_weights(WeightTimes(0.0, weights), COLUMN_BATCHES)
    batches = COLUMN_BATCHES if column else 1
    seconds = 0.0
    for tokens in range(prompt + 1, prompt + steps + 1):
        group = GroupPrices(prices, tokens, inputs=tokens)
        best = split_point(group) if setting["method"] == "kvpr" else 0
        seconds += float(split_seconds(group, best)) + constants["layer_s"]
    seconds *= len(model.layers) * batches
    return batches * COLUMN_BATCH * steps / seconds if column else seconds


def layer_prices(model: ModelShape, constants: Constants, *, batch: int) -> LayerPrices:
    """The paper's form: by v_com and v_gpu alone, `l` counting tokens of each of `batch` equal sequences."""
    hidden, kv_dim, link = model.hidden, model.kv_heads * model.key_dim, constants["link_bytes_s"]
    return LayerPrices(
        kv_s=2 * batch * kv_dim * model.element_bytes / link,
        activation_s=batch * hidden * model.element_bytes / link,
        recompute_s=4 * batch * hidden * kv_dim / constants["recompute_flops"],
    )
