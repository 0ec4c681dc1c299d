// Rows in the browser: reading the wire format (safetensors), norms, and similarities. Pure; knows no page.

const READERS = {
  F32: (buffer, start, end) => new Float32Array(buffer.slice(start, end)),
  BF16: (buffer, start, end) => {
    const halves = new Uint16Array(buffer.slice(start, end));
    const wide = new Uint32Array(halves.length);
    halves.forEach((bits, index) => (wide[index] = bits << 16));
    return new Float32Array(wide.buffer);
  },
  F16: (buffer, start, end) => Float32Array.from(new Uint16Array(buffer.slice(start, end)), half),
  I64: (buffer, start, end) => Array.from(new BigInt64Array(buffer.slice(start, end)), Number),
};

// IEEE half precision: sign, five bits of exponent, ten of fraction.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// -> { rows: Float32Array, count, width, dtype, grid: [[t, h, w], …] }; throws where the document is none.
export function read(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensor = (name) => {
    const { dtype, data_offsets: [start, end] } = header[name];
    return READERS[dtype](buffer, 8 + length + start, 8 + length + end);
  };
  const [total, width] = header.rows.shape;
  const flat = header.grid_thw ? tensor("grid_thw") : [];
  const grid = Array.from({ length: flat.length / 3 }, (_, index) => flat.slice(3 * index, 3 * index + 3));
  return { rows: tensor("rows"), count: total, width, dtype: header.rows.dtype, grid };
}

const row = (embedding, index) => embedding.rows.subarray(index * embedding.width, (index + 1) * embedding.width);
const dot = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);

export function norms(embedding) {
  return Array.from({ length: embedding.count }, (_, index) => Math.sqrt(dot(row(embedding, index), row(embedding, index))));
}

// Cosine of the row `index` with each row.
export function similarities(embedding, index) {
  const lengths = norms(embedding);
  const mine = row(embedding, index);
  return lengths.map((length, other) => dot(mine, row(embedding, other)) / (length * lengths[index] || 1));
}
