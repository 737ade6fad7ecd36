// Reads a stream of safetensors frames: `chunks` is a response's body, or any (async) iterable of
// Uint8Array. Yields each record with its tensors, the last one too; throws the server's error.
export async function* frames(chunks) {
  let rest = new Uint8Array(0), record = {}, end;
  for await (const chunk of chunks.getReader ? read(chunks.getReader()) : chunks) {
    rest = joined(rest, chunk);
    for (; rest.length >= 8 && rest.length >= (end = 8 + uint64(rest)); rest = rest.subarray(end)) {
      const start = 16 + uint64(rest.subarray(8));
      const header = JSON.parse(new TextDecoder().decode(rest.subarray(16, start)));
      const { __metadata__, ...tensors } = header;
      record = JSON.parse(__metadata__.record);
      if (record.error) throw Object.assign(new Error(record.error.message), { record });
      for (const tensor of Object.values(tensors)) {
        const [first, stop] = tensor.data_offsets.map((offset) => start + offset);
        const Numbers = ARRAYS[tensor.dtype];
        tensor.data = new Numbers(rest.slice(first, stop).buffer);
      }
      yield { record, tensors };
    }
  }
  if (rest.length || record.object !== "done") throw new Error("the stream ended too early");
}

const ARRAYS = { F32: Float32Array, F16: globalThis.Float16Array, I64: BigInt64Array };

function uint64(bytes) {
  return Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
}

function joined(a, b) {
  const both = new Uint8Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

async function* read(reader) {
  try {
    for (let part; !(part = await reader.read()).done; ) yield part.value;
  } finally {
    await reader.cancel(); // whoever stops listening ends the server's work
  }
}
