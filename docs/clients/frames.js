// Reads a stream of safetensors frames; `body` is that of a response. Yields each record with its
// tensors, the last one too; throws the server's error.
export async function* frames(body) {
  const reader = body.getReader();
  let rest = new Uint8Array(0), record = {}, end;
  try {
    for (let part; !(part = await reader.read()).done; ) {
      rest = new Uint8Array(await new Blob([rest, part.value]).arrayBuffer());
      for (; rest.length >= 8 && rest.length >= (end = 8 + uint64(rest)); rest = rest.subarray(end)) {
        const start = 16 + uint64(rest.subarray(8));
        const header = JSON.parse(new TextDecoder().decode(rest.subarray(16, start)));
        const { __metadata__, ...tensors } = header;
        record = JSON.parse(__metadata__.record);
        if (record.error) throw Object.assign(new Error(record.error.message), { record });
        for (const tensor of Object.values(tensors)) {
          const [first, stop] = tensor.data_offsets, numbers = NUMBERS[tensor.dtype];
          tensor.data = numbers(rest.slice(start + first, start + stop).buffer);
        }
        yield { record, tensors };
      }
    }
  } finally {
    await reader.cancel(); // whoever stops listening ends the server's work
  }
  if (rest.length || record.object !== "done") throw new Error("the stream ended too early");
}

const uint64 = ({ buffer, byteOffset }) =>
  Number(new DataView(buffer, byteOffset).getBigUint64(0, true));

const NUMBERS = {
  F32: (buffer) => new Float32Array(buffer),
  F16: (buffer) => Float32Array.from(new Uint16Array(buffer), half),
  I64: (buffer) => new BigInt64Array(buffer),
};

function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = (bits & 1023) / 1024, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
}
