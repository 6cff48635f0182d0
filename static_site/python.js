// Python as it stood when the site was built: a picture of its memory, taken after all modules were imported and the first
// answers given. Whoever loads it (worker.js) neither starts Python nor imports anything, which took four seconds.
//
// Pyodide takes and loads such pictures (_makeSnapshot, _loadSnapshot), of Python alone. Here pydantic-core is in it, too:
// memory refers to a library's functions by their places in a table, given in the order of loading. So it is linked before
// Python starts, at the same place, where the picture is taken and where it is loaded.
export const APP = "/app";
export const CORE = `${APP}/pydantic_core/_pydantic_core.cpython-314-wasm32-emscripten.so`;

// Places in the table that are left free before that: in a browser that has WebAssembly's garbage collection CPython puts
// a function of its own there, and the node that takes the picture may not have it.
const SPARE = 64;

// A function that makes Pyodide (its createPyodideModule) and first links pydantic-core from the address `core`. `placed`
// is given the length of the table and says where in it the library goes; then `linked` is awaited.
export function linking(create, core, placed, linked) {
  return settings => {
    const plain = settings.locateFile;
    settings.locateFile = (name, ...more) => name === CORE ? core : plain(name, ...more);
    return new Promise((resolve, reject) => {
      settings.preRun.push(async module => {
        module.addRunDependency(CORE);
        try {
          module.wasmTable.grow(placed(module.wasmTable.length) - module.wasmTable.length);
          await module.loadDynamicLibrary(CORE, { loadAsync: true, global: false, nodelete: true }, {});
          await linked(module);
          module.removeRunDependency(CORE);
        } catch (error) { reject(error); }
      });
      create(settings).then(resolve, reject);
    });
  };
}

// Where memory begins in a picture: behind a head that Pyodide writes.
const begins = picture => new Uint32Array(picture.buffer, picture.byteOffset, 2)[1];

// Out of a picture, or into it again, what memory holds before Python starts: most of that is in the WebAssembly already.
// And where a browser's memory differs from node's before Python starts (the place of that function), it stays its own.
export function difference(picture, before) {
  const memory = new Uint32Array(picture.buffer, picture.byteOffset + begins(picture));
  const known = new Uint32Array(before.buffer, before.byteOffset, before.byteLength / 4);
  for (let i = 0; i < known.length; i++) memory[i] ^= known[i];
}

// Take a picture later: `told` is given the place of pydantic-core, and memory as it is before Python starts.
export function forPicture(create, core, told) {
  let place;
  const placed = taken => place = taken + SPARE;
  const made = linking(create, core, placed, module => told(place, module.HEAPU8.slice()));
  return { createPyodideModule: made, _makeSnapshot: true };
}

// Load a picture, which is filled until `arrived` resolves, with pydantic-core at its place.
export function withPicture(create, core, place, picture, arrived) {
  const made = linking(create, core, () => place, async module => {
    await arrived;
    difference(picture, module.HEAPU8);
    module.growMemory(picture.length - begins(picture));
  });
  return { createPyodideModule: made, _loadSnapshot: picture };
}
