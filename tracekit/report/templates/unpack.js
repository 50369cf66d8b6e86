"use strict";
// What is large stands in the page as base64 of raw deflate (RFC 1951); it is unpacked when it is first needed, at once and without the
// network, in any browser.
const unpack = (() => {
  const LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
  const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
  const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

  // Codes of given lengths as a table: the next `bits` bits of the stream lead to symbol * 16 + length.
  function codes(lengths) {
    const bits = Math.max(1, ...lengths), table = new Uint16Array(1 << bits), count = new Uint16Array(17), next = new Uint16Array(17);
    for (const length of lengths) count[length]++;
    count[0] = 0;
    for (let length = 1; length <= bits; length++) next[length] = (next[length - 1] + count[length - 1]) << 1;
    lengths.forEach((length, symbol) => {
      if (!length) return;
      let code = next[length]++, turned = 0;
      for (let i = 0; i < length; i++) { turned = (turned << 1) | (code & 1); code >>= 1; }
      for (let i = turned; i < table.length; i += 1 << length) table[i] = (symbol << 4) | length;
    });
    return { table, mask: table.length - 1 };
  }

  const fixed = () => [
    codes(Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))), codes(new Array(30).fill(5)),
  ];

  function inflate(packed, size) {
    const out = new Uint8Array(size);
    let at = 0, to = 0, held = 0, waiting = 0;

    function take(bits) {
      while (waiting < bits) { held |= packed[at++] << waiting; waiting += 8; }
      const value = held & ((1 << bits) - 1);
      held >>>= bits;
      waiting -= bits;
      return value;
    }

    function symbol({ table, mask }) {
      while (waiting < 15 && at < packed.length) { held |= packed[at++] << waiting; waiting += 8; }
      const entry = table[held & mask];
      held >>>= entry & 15;
      waiting -= entry & 15;
      return entry >> 4;
    }

    function described() {
      const literals = take(5) + 257, distances = take(5) + 1, given = take(4) + 4, own = new Array(19).fill(0), lengths = [];
      for (let i = 0; i < given; i++) own[ORDER[i]] = take(3);
      const code = codes(own);
      while (lengths.length < literals + distances) {
        const value = symbol(code);
        if (value < 16) { lengths.push(value); continue; }
        const again = value === 16 ? lengths[lengths.length - 1] : 0, times = value === 16 ? 3 + take(2) : value === 17 ? 3 + take(3) : 11 + take(7);
        for (let i = 0; i < times; i++) lengths.push(again);
      }
      return [codes(lengths.slice(0, literals)), codes(lengths.slice(literals))];
    }

    for (let last = 0; !last;) {
      last = take(1);
      const kind = take(2);
      if (kind === 0) {
        at -= waiting >> 3; // whole bytes that were taken ahead
        held = waiting = 0;
        const length = packed[at] | (packed[at + 1] << 8);
        out.set(packed.subarray(at + 4, at + 4 + length), to);
        at += 4 + length;
        to += length;
        continue;
      }
      const [literal, distance] = kind === 1 ? fixed() : described();
      for (;;) {
        const value = symbol(literal);
        if (value < 256) { out[to++] = value; continue; }
        if (value === 256) break;
        const length = LENGTHS[value - 257] + take(LENGTH_BITS[value - 257]), place = symbol(distance);
        const more = place < 2 ? 0 : (place >> 1) - 1, back = (place < 2 ? place : (2 + (place & 1)) << more) + 1 + take(more);
        for (const end = to + length; to < end; to++) out[to] = out[to - back];
      }
    }
    return out;
  }

  return (text, size) => {
    const raw = atob(text), packed = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
    return inflate(packed, size);
  };
})();
